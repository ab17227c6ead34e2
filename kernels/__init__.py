"""Kernels, one folder an operation: checks and choice of backend, plain reference, backends."""
