"""Pure: times at which an order keeps a deployment's model warm."""
