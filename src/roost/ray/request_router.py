"""Request router: Ray Serve's public interface on one side, our placement on the other.

Each call of a replica has an `Address` as its first argument, which says what it wants. Ray leaves replicas that stop
out of its candidates: they get nothing new. Ray copies this module into each process by value, so that it must own
nothing that another imports. Named in the deployment's options.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from roost.ray.places import Address, Places


class SessionRouter(RequestRouter):
    """Ray's router for replicas that hold sessions."""

    _places: Places | None = None  # known from the first call on

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come or gone, or have said something about themselves."""
        super().update_replicas(replicas)
        self._tell()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one replica for a call; Ray asks again while that cannot take it."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        address = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(address, Address):
            return [candidate_replicas]
        self._places = address.places
        self._tell()
        if address.only in by_name:
            return [[by_name[address.only]]]
        cached = ((name, self.replica_queue_len_cache.get(each.replica_id)) for name, each in by_name.items())
        chosen = address.places.choose(address.wanted, {name: queue for name, queue in cached if queue is not None})
        return [[by_name[chosen]]] if chosen in by_name else [candidate_replicas]

    def _tell(self) -> None:
        if self._places is not None:
            self._places.update({each.replica_id.unique_id: each.routing_stats for each in self.curr_replicas.values()})
