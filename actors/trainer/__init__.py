"""Training: the step, the loop of a worker, and the driver that runs workers on Ray Train."""
