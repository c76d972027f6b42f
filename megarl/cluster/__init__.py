"""Start the remote processes of a run (Ray, trainer ranks, vLLM engines) and call them; runs can use them in turn.

    with Cluster(config, roles=inputs.roles) as cluster:
        Trainer(inputs, cluster, recorder).fit()

Ray actors are thin wrappers: the work is in `parallel.worker` and `rollout.engine`. Nothing is imported here, so that a
remote process imports only what it needs.
"""
