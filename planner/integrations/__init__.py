"""Other training frameworks on a plan: transformers' Trainer, accelerate, PEFT; each imported by its own name."""
