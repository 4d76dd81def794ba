"""The memory of a device: pages, addresses, transfers."""
