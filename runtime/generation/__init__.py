"""Generation under a plan: Hugging Face's own loop on the first rank, sharded programs and caches on all."""
