"""What happened, in one vocabulary for predicted and measured timelines. Floor 1: imports only spec, and no torch."""
