"""For slime and miles: `--custom-update-weight-post-write-path refit_hook.publish`, with this file on PYTHONPATH."""

import os

from refitd_client.trainers.slime import DiskUpdates

publish = DiskUpdates(os.environ["REFITD_ROOT"], os.environ["REFITD_RUN"], os.environ["REFITD_URL"], wait=60)
