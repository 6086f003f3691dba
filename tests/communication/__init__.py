"""What ranks send each other, recorded on any backend, and held against NCCL's rules."""
