"""Declared objects, in Kubernetes or in a folder, are brought onto the platform over the REST API alone."""
