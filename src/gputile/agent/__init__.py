"""The node agent: publishes the node's cards, serves the kubelet, and gives each container the cards of its grant.

The pure parts are `inventory`, `health`, `isolation`, `overlap`, `preferred_allocation` and `consistency`; `app` runs
them together. The agent makes no placement decision: which card a pod gets is in the grant on the pod, which only the
scheduler's leader writes.
"""
