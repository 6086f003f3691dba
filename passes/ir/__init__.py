"""Plain data that everything shares: the graph, the types of tensors on a mesh, and conversions between them."""
