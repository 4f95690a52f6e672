"""The training loop: one rank's work from joining the job to leaving it."""
