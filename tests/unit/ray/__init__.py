"""What of the replicas on Ray Serve needs no Ray."""
