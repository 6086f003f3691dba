"""The compiler: the graph, the plan as data, sharding rules, graph passes, and the emitter."""
