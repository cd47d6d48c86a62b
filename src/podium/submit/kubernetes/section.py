"""What a site says about its Kubernetes."""

from podium.recipe.section import Section
from podium.submit.words import Word


class KubernetesSection(Section):
    """How jobs are handed to Kubernetes."""

    #: of the kubeconfig; None: the current one
    context: Word | None = None
    namespace: Word | None = None
