"""The simulator: the same policies as the runtime's, on many devices that exist on paper alone."""
