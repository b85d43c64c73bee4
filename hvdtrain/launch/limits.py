"""What a launcher can be asked for: each builder declares its limits as a value, and what lies beyond is refused here."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launch import Job, environment


@dataclass(frozen=True)
class Limits:
    """What the launcher that messages call ``title`` can do; ``instead`` is the way around for a host that it cannot be told."""

    title: str
    elastic: bool = False
    ipv6: bool = False
    users: bool = False  # of single hosts
    ports: bool = False  # of single hosts
    odd_variables: bool = False  # names that no shell can hold
    arguments: bool = True  # of the user's, for the launcher itself
    instead: str = "give the host a name in ~/.ssh/config (HostName, User, Port) and use that name"

    def check(self, job: Job, taken: Set[str] = frozenset()) -> None:
        """UsageError with everything that the job asks for and this launcher cannot do.

        ``taken`` are words that it acts on wherever they stand. Our relay has them guarded.
        """
        found = dict(self._beyond(job))
        if not job.tagged:
            words = [f"'{word}'" for word in job.argv if word in taken]
            words = [f"'{job.argv[0]}', which is no program", *words] if job.argv[0].startswith("-") else words
            if words and self.arguments:
                found[f"{self.title} takes words of the program for its own: {', '.join(words[:8])}"] = "leave --no-relay out"
        if found:
            raise UsageError("\n".join(found), "; ".join(dict.fromkeys(found.values())))

    def _beyond(self, job: Job) -> Iterator[tuple[str, str]]:
        """(problem, hint), the first of each kind."""
        if job.elastic is not None and not self.elastic:
            yield f"{self.title} cannot change the number of ranks of a running job", "use --launcher horovodrun"
        for host in job.hosts:
            if host.is_ipv6 and not self.ipv6:
                yield f"{self.title} takes no IPv6 address ({host.name})", self.instead
                break
        for host in job.hosts:
            if host.user and not self.users:
                yield f"{self.title} takes no user of a single host ({host.login})", self.instead
                break
        for host in job.hosts:
            if host.port is not None and not self.ports:
                yield f"{self.title} takes no port of a single host ({host.name}, port {host.port})", self.instead
                break
        odd = next((name for name in sorted(job.env) if not environment.is_portable(name)), None)
        if odd is not None and not self.odd_variables:
            yield f"{self.title} cannot pass the variable '{odd}'", "leave it out"
        if job.launcher_args and not self.arguments:
            yield f"{self.title} takes no arguments of its own", "leave --launcher-arg out"
