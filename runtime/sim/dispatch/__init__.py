"""Dispatch in the simulator: as gateways choose, and as the compared policies choose."""
