"""Reads text without preparation: lists and indexes the files, runs loader processes, and keeps the cache and the lanes."""
