"""The verbs that kube-scheduler calls over HTTP, also under the paths of older extenders."""
