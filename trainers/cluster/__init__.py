"""The use of Ray: clusters, workers, ranks, jobs, storage, and the queue that carries records from workers to the driver."""
