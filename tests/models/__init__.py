"""Tests of meshwright.models."""
