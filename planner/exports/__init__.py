"""A plan as the configuration of another framework, and searches within what that framework can say.

Each framework is one table (``megatron_table``, …): its settings as functions of a plan's facts, and its limits.
"""
