"""Measurements on the present devices."""
