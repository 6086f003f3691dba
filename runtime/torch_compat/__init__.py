"""What torch, spmd_types, triton and transformers have but do not export, as far as running a program needs it.

No other file of ``runtime`` or ``planner`` names any of it. ``runtime_names`` lists every name with what breaks without
it; a test holds the list against the installed versions and against the code. The compiler has ``passes.torch_compat``.
"""
