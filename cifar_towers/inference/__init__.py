"""Evaluate, predict with, export and compare trained runs."""
