"""What a call depends on: arguments by content, attributes and modes of the model, what its code reads around it."""
