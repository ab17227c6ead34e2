"""Cluster files that come with the library."""
