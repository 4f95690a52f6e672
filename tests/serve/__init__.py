"""Tests of meshwright.serve."""
