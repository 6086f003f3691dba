"""Ranks that come and go: who takes part, second holders of every shard, and what goes on without the lost."""
