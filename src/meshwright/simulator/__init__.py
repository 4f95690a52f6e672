"""A schedule played on a cluster before it is run on one: predicted timelines. Floor 2: no torch."""
