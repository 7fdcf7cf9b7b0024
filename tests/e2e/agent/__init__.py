"""The agent on two real kubelets with containerd and real containers: every container gets exactly its GPU.

`site` starts the machines, the agents, gputile's scheduler and kube-scheduler once for all tests here; each test has a
namespace of its own and restores the site at its end.
"""
