"""Training on one rank, from joining the job to leaving it."""
