"""End-to-end tests on a real API server and a real kube-scheduler, on one small machine.

Room:  `programs` builds them, `control_plane` runs them, `nodes`, `kubelets` and `service` play what has no program
       here, `api` is the witness: it asks the API server and shares no code with gputile.
       `machines` runs real nodes: a kubelet, containerd and containers.
Door:  `make e2e`. Cases take the fixtures of `conftest.py`.
"""
