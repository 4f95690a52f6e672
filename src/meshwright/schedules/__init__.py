"""When things run: schedules as lists of actions, made by pure functions. Floor 1: imports only spec, and no torch."""
