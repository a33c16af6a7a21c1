"""A Ray cluster over HTTP: the dashboard's State and Jobs APIs, with our token and bounded waits.

Ray's own clients are not used: they have no timeouts, let RAY_ADDRESS overrule the address that
they are given, take the token from process-wide settings and cost a second to import.
https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html
"""

from typing import Any

import httpx

from eagleray.platform.errors import (
    AuthenticationError,
    DeadlineExceededError,
    NotFoundError,
    ServiceError,
)

_MAX_SHOWN = 500


class Dashboard:
    """One dashboard.

    Args:
        url: `http://host:port`.
        token: The cluster's token; None for one that has none.
        timeout_s: Longest wait for any one answer.
        transport: Where requests go instead of the network, in tests.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_s: float = 20.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        # trust_env off: a proxy from the environment must not see the token.
        self._client = httpx.Client(
            base_url=self.url,
            headers=self.headers,
            timeout=timeout_s,
            trust_env=False,
            transport=transport,
        )

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def call(self, method: str, path: str, **content: Any) -> Any:
        """One request.

        Returns:
            The answer's JSON value; its text if it is not JSON.

        Raises:
            AuthenticationError: The token is missing or wrong.
            NotFoundError: There is no such thing there.
            DeadlineExceededError: No answer came in time.
            ServiceError: Nothing answers there, or the cluster failed.
        """
        try:
            answer = self._client.request(method, path, **content)
        except httpx.TimeoutException:
            raise DeadlineExceededError(
                f"the Ray dashboard at {self.url} gave no answer in {self.timeout_s:g} s",
                "see `eagleray status`",
            ) from None
        except httpx.HTTPError as error:
            raise ServiceError(
                f"no Ray dashboard answers at {self.url}: {error}", "see `eagleray status`"
            ) from error
        if answer.status_code in (401, 403):
            raise AuthenticationError(
                f"the Ray cluster at {self.url} refused the token ({answer.status_code})",
                "use the token of the cluster that is running: see docs/operations.md#tokens",
            )
        if answer.status_code == 404:
            raise NotFoundError(answer.text[:_MAX_SHOWN] or f"{path} is not there")
        if answer.is_error:
            raise ServiceError(
                f"the Ray cluster at {self.url} failed at {method} {path}: "
                f"{answer.status_code} {answer.text[-_MAX_SHOWN:]}"
            )
        if answer.headers.get("content-type", "").startswith("application/json"):
            return answer.json()
        return answer.text

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive, as the State API tells them."""
        answer = self.call("GET", "/api/v0/nodes", params={"detail": "1"})
        return [node for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"]

    def usage(self) -> dict[str, tuple[float, float]]:
        """Used and total amount of each resource; empty before the first report of the monitor."""
        answer = self.call("GET", "/api/cluster_status")
        report = (answer["data"].get("clusterStatus") or {}).get("loadMetricsReport") or {}
        return {name: (used, total) for name, (used, total) in report.get("usage", {}).items()}
