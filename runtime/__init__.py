"""Running an emitted program: weights, the parallel module, the type check, counting what is sent."""
