"""`python ray_cluster.py CPUS CPUS`: runs a Ray cluster of two nodes here until its input ends, and prints its address."""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    first, second = map(int, sys.argv[1:])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": first, "include_dashboard": False})
    cluster.add_node(num_cpus=second)
    print(f"Ray cluster at {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()
