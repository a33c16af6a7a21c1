"""What a cluster's URL becomes for each of its nodes."""

import pytest

from eagleray.actors.cache.cluster_link import ClusterLink, is_cluster_url


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("redis-cluster://127.0.0.1:7001", None),
        ("redis-cluster://user:p%40ss@127.0.0.1:7001", "p@ss"),
        ("redis-cluster://user:{host}{}@127.0.0.1:7001", "{host}{}"),
    ],
)
def test_every_node_is_asked_with_the_login_of_the_url(url: str, password: str | None) -> None:
    assert is_cluster_url(url)
    node = ClusterLink(url, 1)._node(("10.0.0.9", 7002))
    connection = node.link._connection
    assert (connection.host, connection.port) == ("10.0.0.9", 7002)
    assert connection.password == password


@pytest.mark.parametrize("url", ["redis://127.0.0.1", "redis-cluster://", "unix:///a"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="begins with redis-cluster or rediss-cluster"):
        ClusterLink(url, 1)
