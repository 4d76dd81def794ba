"""Pure: declared objects, their schemas, and the next call that brings the platform to what the objects declare."""
