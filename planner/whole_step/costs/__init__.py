"""What one candidate costs: shardings, units and bounds."""
