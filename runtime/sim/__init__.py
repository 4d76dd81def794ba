"""The simulator: the policies of the runtime, on many simulated devices."""
