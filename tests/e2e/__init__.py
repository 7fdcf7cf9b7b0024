"""End-to-end tests on a real API server and a real kube-scheduler, on one small machine: `make e2e`.

`programs` builds them, `control_plane` runs them; `nodes`, `kubelets` and `service` replace what has no program here.
`api` reads the API server and shares no code with gputile. `machines` runs real nodes: a kubelet, containerd and
containers. Tests use the fixtures of `conftest.py`.
"""
