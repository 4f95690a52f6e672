"""Tests of meshwright.kernels."""
