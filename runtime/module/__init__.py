"""What the user holds: the parallel module, and gradients of several batches added up."""
