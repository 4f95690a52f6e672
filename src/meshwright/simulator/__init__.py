"""Simulates schedules, plans and serving: predicted timelines. Without torch."""
