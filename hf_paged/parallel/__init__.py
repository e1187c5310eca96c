"""One model over several ranks: sharded layers, their loading, communication, worker processes, gathered replicas."""
