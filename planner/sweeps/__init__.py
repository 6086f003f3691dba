"""Sweeps: many plans of one study, planned in parallel, resumed after a kill, compared in tables and charts."""
