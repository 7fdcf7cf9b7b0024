"""The agent on two real kubelets with containerd and real containers: every container holds exactly its card.

`site` puts the machines, the agents, our scheduler and kube-scheduler together once for all cases here; each case has a
namespace of its own and leaves the site as it found it.
"""
