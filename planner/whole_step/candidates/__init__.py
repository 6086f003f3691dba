"""What is searched: meshes, micro-batches and schedules, what the user demands of them, and what experts would take."""
