"""Tests of meshwright.checkpoint."""
