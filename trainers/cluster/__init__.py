"""Ray: joining it, workers and ranks on it, jobs, storage, and the way of records from workers to the driver."""
