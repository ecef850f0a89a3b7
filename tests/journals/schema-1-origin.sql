-- The same as schema-1-first.sql, written by the code that added the origin and the records' checksums.
PRAGMA user_version=1;
CREATE TABLE versions (
	id TEXT NOT NULL, 
	run TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (id)
);
CREATE INDEX versions_by_state ON versions (state, generation, step);
CREATE INDEX versions_by_order ON versions (run, generation, step);
CREATE INDEX versions_newest ON versions (generation, step, id);
CREATE TABLE engines (
	id TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE attempts (
	id TEXT NOT NULL, 
	engine TEXT NOT NULL, 
	version TEXT NOT NULL, 
	outcome TEXT, 
	record BLOB NOT NULL, 
	PRIMARY KEY (id)
);
CREATE INDEX ix_attempts_version ON attempts (version);
CREATE INDEX ix_attempts_engine ON attempts (engine);
CREATE TABLE fingerprints (
	version TEXT NOT NULL, 
	configuration TEXT NOT NULL, 
	fingerprint TEXT NOT NULL, 
	PRIMARY KEY (version, configuration)
);
CREATE TABLE rollouts (
	number INTEGER NOT NULL, 
	run TEXT NOT NULL, 
	version TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (number)
);
CREATE INDEX ix_rollouts_run ON rollouts (run);
CREATE TABLE events (
	seq INTEGER NOT NULL, 
	subject TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (seq)
);
CREATE INDEX ix_events_subject ON events (subject);
CREATE TABLE origin (
	id INTEGER NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO versions VALUES ('run~v000001', 'run', 1, 1, 'DELETED', CAST('{"run":"run","order":{"generation":1,"step":1},"path":"run/v000001","state":"DELETED","created_at":"2026-11-21T20:22:35.683Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:f27cffdf847f86fd178b9599f7b0d037","weights":"xxh3:f21412c444630b695af11c15b914a1e9","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:a487f00bf6a9d3f7950205c2932df6f1","owned":true,"noticed":false,"pinned":false,"barred":false,"served_at":"2026-11-21T20:22:35.705Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":4.812785999092739,"load":1.0}}
54872a02c113ace1' AS BLOB));
INSERT INTO versions VALUES ('run~v000002', 'run', 1, 2, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":2},"path":"run/v000002","state":"SEALED","created_at":"2026-11-21T20:22:35.731Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:3367648afd2a52e3c47ec98469bbb731","weights":"xxh3:064ccb7688e227b6c55d565294717b71","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:28328c9a24a77a64886dd2bbec98fee2","owned":true,"noticed":false,"pinned":true,"barred":false,"served_at":"2026-11-21T20:22:35.744Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":4.403200997330714,"load":1.0}}
c1395189f035b7e7' AS BLOB));
INSERT INTO versions VALUES ('run~v000003', 'run', 1, 3, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":3},"path":"run/v000003","state":"SEALED","created_at":"2026-11-21T20:22:35.777Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:6f31cad16c56bdc1f97a35b085d8e806","weights":"xxh3:35acacbf23b4df10398b2fd6089191ee","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:3e781d4ed27f1678aeddfd3adadc4a43","owned":true,"noticed":false,"pinned":false,"barred":false,"served_at":"2026-11-21T20:22:35.790Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":6.849078999948688,"load":1.0}}
1f6379a3af4911d4' AS BLOB));
INSERT INTO versions VALUES ('run~v000004', 'run', 1, 4, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":4},"path":"run/v000004","state":"SEALED","created_at":"2026-11-21T20:22:35.820Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:cb4ac43cde497d6e2001f5002e4fb4b1","weights":"xxh3:851b74df935b2377c07ddb63d260c1bf","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:d9f9854049e1aecb249c0ebdc45f8ca9","owned":true,"noticed":false,"pinned":false,"barred":false,"served_at":"2026-11-21T20:22:35.828Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":3.5873439992428757,"load":1.0}}
95b6e8c57cd19920' AS BLOB));
INSERT INTO versions VALUES ('run~v000005', 'run', 1, 5, 'REJECTED', CAST('{"run":"run","order":{"generation":1,"step":5},"path":"run/v000005","state":"REJECTED","created_at":"2026-11-21T20:22:35.916Z","kind":"full","base":null,"reason":"tensor layer.0.weight (F32 [4, 3]) is missing (the model is /srv/refitd/base): an engine would go on with its old values; publish every tensor, or say allow_missing in the notice","bytes":null,"digest":null,"weights":null,"shards":null,"inventory":null,"signature":null,"owned":false,"noticed":false,"pinned":false,"barred":true,"served_at":null,"allow_missing":false,"allow_extra":false,"metadata":{},"timings":{}}
52c7ba9fe0e5df1f' AS BLOB));
INSERT INTO versions VALUES ('run~v000006', 'run', 1, 6, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":6},"path":"run/v000006","state":"SEALED","created_at":"2026-11-21T20:22:35.959Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:59b27925948bc499ba1454cff62bc89e","weights":"xxh3:7aa107cd5b7bab3bf9a040f380b5f09d","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:ba4c54de5840a7037773976b9d01c27a","owned":true,"noticed":false,"pinned":false,"barred":true,"served_at":"2026-11-21T20:22:35.973Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":8.705047002877109,"load":1.0}}
8191683da773b0c1' AS BLOB));
INSERT INTO engines VALUES ('a:1', CAST('{"id":"a:1","url":"http://a:1","run":"run","run_named":false,"source":"settings","state":"IN_SYNC","serving":"run~v000004","known":true,"resume_owed":false,"unproven":[],"weight_version":"4","model_path":"/srv/refitd/root/run/v000004","configuration":"simulated","startup_path":"/base","reason":null,"failures":0,"taints":0,"strikes":{},"skipped":0,"unreachable_since":null,"last_attempt":{"id":"765b77b7ff244839ba00cb433684856f","engine":"a:1","version":"run~v000004","started_at":"2026-11-21T20:22:35.976Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}}
b18737a1519f9097' AS BLOB));
INSERT INTO engines VALUES ('b:1', CAST('{"id":"b:1","url":"http://b:1","run":"run","run_named":false,"source":"settings","state":"IN_SYNC","serving":"run~v000004","known":true,"resume_owed":false,"unproven":[],"weight_version":"4","model_path":"/srv/refitd/root/run/v000004","configuration":"simulated","startup_path":"/base","reason":null,"failures":0,"taints":0,"strikes":{},"skipped":0,"unreachable_since":null,"last_attempt":{"id":"906dedcfd3af47b39eb84547715bf4c6","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T20:22:35.976Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}}
371d695c997e7e2e' AS BLOB));
INSERT INTO attempts VALUES ('298bce0174ae4dbd94ce3a31cbef38c4', 'a:1', 'run~v000001', 'ACK', CAST('{"id":"298bce0174ae4dbd94ce3a31cbef38c4","engine":"a:1","version":"run~v000001","started_at":"2026-11-21T20:22:35.701Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
461ebcbe588b7fe5' AS BLOB));
INSERT INTO attempts VALUES ('81889a4c442f41e0b9dc04ca27ceee9b', 'b:1', 'run~v000001', 'ACK', CAST('{"id":"81889a4c442f41e0b9dc04ca27ceee9b","engine":"b:1","version":"run~v000001","started_at":"2026-11-21T20:22:35.701Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
500750b936cee12f' AS BLOB));
INSERT INTO attempts VALUES ('857295be157f436d9b140c5344341440', 'a:1', 'run~v000002', 'ACK', CAST('{"id":"857295be157f436d9b140c5344341440","engine":"a:1","version":"run~v000002","started_at":"2026-11-21T20:22:35.741Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
780c02ee1ef6f965' AS BLOB));
INSERT INTO attempts VALUES ('0d55479817d448a7b38deec31bc36d8f', 'b:1', 'run~v000002', 'ACK', CAST('{"id":"0d55479817d448a7b38deec31bc36d8f","engine":"b:1","version":"run~v000002","started_at":"2026-11-21T20:22:35.741Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
f97b7cdaecd760f1' AS BLOB));
INSERT INTO attempts VALUES ('536f4d8b10bb4345ae7c12e62b3cc12e', 'a:1', 'run~v000003', 'ACK', CAST('{"id":"536f4d8b10bb4345ae7c12e62b3cc12e","engine":"a:1","version":"run~v000003","started_at":"2026-11-21T20:22:35.786Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
2e0ac201da889d05' AS BLOB));
INSERT INTO attempts VALUES ('0ebb7b22a941491eadc7cdfe2a971b9a', 'b:1', 'run~v000003', 'ACK', CAST('{"id":"0ebb7b22a941491eadc7cdfe2a971b9a","engine":"b:1","version":"run~v000003","started_at":"2026-11-21T20:22:35.787Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
e5903b1b62e4db63' AS BLOB));
INSERT INTO attempts VALUES ('eb210921f95b4e83b20ae58598df6fd7', 'a:1', 'run~v000004', 'ACK', CAST('{"id":"eb210921f95b4e83b20ae58598df6fd7","engine":"a:1","version":"run~v000004","started_at":"2026-11-21T20:22:35.825Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
8dd32ec131de7bfb' AS BLOB));
INSERT INTO attempts VALUES ('58f906a5ebea48f884a7366bce7bfb3f', 'b:1', 'run~v000004', 'ACK', CAST('{"id":"58f906a5ebea48f884a7366bce7bfb3f","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T20:22:35.825Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
619fc82ed97c4f03' AS BLOB));
INSERT INTO attempts VALUES ('51f8bd05c2a245fba1f9759cf13d0c88', 'a:1', 'run~v000006', 'ACK', CAST('{"id":"51f8bd05c2a245fba1f9759cf13d0c88","engine":"a:1","version":"run~v000006","started_at":"2026-11-21T20:22:35.970Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
baad8014d6602f55' AS BLOB));
INSERT INTO attempts VALUES ('df4fd60530204085aa21871a34828765', 'b:1', 'run~v000006', 'ACK', CAST('{"id":"df4fd60530204085aa21871a34828765","engine":"b:1","version":"run~v000006","started_at":"2026-11-21T20:22:35.970Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
8305662a4daecddd' AS BLOB));
INSERT INTO attempts VALUES ('765b77b7ff244839ba00cb433684856f', 'a:1', 'run~v000004', 'ACK', CAST('{"id":"765b77b7ff244839ba00cb433684856f","engine":"a:1","version":"run~v000004","started_at":"2026-11-21T20:22:35.976Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
f6352c0b88a5792a' AS BLOB));
INSERT INTO attempts VALUES ('906dedcfd3af47b39eb84547715bf4c6', 'b:1', 'run~v000004', 'ACK', CAST('{"id":"906dedcfd3af47b39eb84547715bf4c6","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T20:22:35.976Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
61aafaf963b74833' AS BLOB));
INSERT INTO attempts VALUES ('open', 'b:1', 'run~v000004', NULL, CAST('{"id":"open","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T12:00:00.000Z","outcome":null,"reason":null,"timings":{}}
6aea45b19f7f7a07' AS BLOB));
INSERT INTO fingerprints VALUES ('run~v000001', 'simulated', 'contents of /srv/refitd/root/run/v000001');
INSERT INTO fingerprints VALUES ('run~v000002', 'simulated', 'contents of /srv/refitd/root/run/v000002');
INSERT INTO fingerprints VALUES ('run~v000003', 'simulated', 'contents of /srv/refitd/root/run/v000003');
INSERT INTO fingerprints VALUES ('run~v000004', 'simulated', 'contents of /srv/refitd/root/run/v000004');
INSERT INTO fingerprints VALUES ('run~v000006', 'simulated', 'contents of /srv/refitd/root/run/v000006');
INSERT INTO rollouts VALUES (1, 'run', 'run~v000001', CAST('{"number":1,"run":"run","version":"run~v000001","cause":"newest good version","started_at":"2026-11-21T20:22:35.702Z","state":"COMPLETE","check":"pending","reason":null}
657221c83071170f' AS BLOB));
INSERT INTO rollouts VALUES (2, 'run', 'run~v000002', CAST('{"number":2,"run":"run","version":"run~v000002","cause":"newest good version","started_at":"2026-11-21T20:22:35.741Z","state":"COMPLETE","check":"pending","reason":null}
16cc5315779f6125' AS BLOB));
INSERT INTO rollouts VALUES (3, 'run', 'run~v000003', CAST('{"number":3,"run":"run","version":"run~v000003","cause":"newest good version","started_at":"2026-11-21T20:22:35.787Z","state":"COMPLETE","check":"pending","reason":null}
e52ce6b07cf4d4b8' AS BLOB));
INSERT INTO rollouts VALUES (4, 'run', 'run~v000004', CAST('{"number":4,"run":"run","version":"run~v000004","cause":"newest good version","started_at":"2026-11-21T20:22:35.825Z","state":"COMPLETE","check":"pending","reason":null}
613ab7ba51baae7c' AS BLOB));
INSERT INTO rollouts VALUES (5, 'run', 'run~v000006', CAST('{"number":5,"run":"run","version":"run~v000006","cause":"newest good version","started_at":"2026-11-21T20:22:35.970Z","state":"ROLLED_BACK","check":"pending","reason":null}
91a131e7a77ce90a' AS BLOB));
INSERT INTO rollouts VALUES (6, 'run', 'run~v000004', CAST('{"number":6,"run":"run","version":"run~v000004","cause":"rolled back from run~v000006","started_at":"2026-11-21T20:22:35.977Z","state":"COMPLETE","check":"pending","reason":null}
419066a7d02a1893' AS BLOB));
INSERT INTO events VALUES (1, 'a:1', CAST('{"seq":1,"at":"2026-11-21T20:22:35.675Z","kind":"engine","subject":"a:1","text":"added","data":{"state":"PROBING"}}
9633b0bdc021a0fe' AS BLOB));
INSERT INTO events VALUES (2, 'b:1', CAST('{"seq":2,"at":"2026-11-21T20:22:35.676Z","kind":"engine","subject":"b:1","text":"added","data":{"state":"PROBING"}}
52c193f26786b497' AS BLOB));
INSERT INTO events VALUES (3, 'a:1', CAST('{"seq":3,"at":"2026-11-21T20:22:35.680Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves start-up weights","data":{"state":"IN_SYNC"}}
2f769cb71d084460' AS BLOB));
INSERT INTO events VALUES (4, 'b:1', CAST('{"seq":4,"at":"2026-11-21T20:22:35.680Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves start-up weights","data":{"state":"IN_SYNC"}}
ced4177e9e16410a' AS BLOB));
INSERT INTO events VALUES (5, 'run~v000001', CAST('{"seq":5,"at":"2026-11-21T20:22:35.683Z","kind":"version","subject":"run~v000001","text":"found in the root","data":{"state":"ANNOUNCED","step":1,"run":"run"}}
1df1c30c1b53b562' AS BLOB));
INSERT INTO events VALUES (6, 'a:1', CAST('{"seq":6,"at":"2026-11-21T20:22:35.684Z","kind":"engine","subject":"a:1","text":"follows run run","data":{"state":"IN_SYNC"}}
77a38d49badee630' AS BLOB));
INSERT INTO events VALUES (7, 'b:1', CAST('{"seq":7,"at":"2026-11-21T20:22:35.684Z","kind":"engine","subject":"b:1","text":"follows run run","data":{"state":"IN_SYNC"}}
82fc34872ee14ad4' AS BLOB));
INSERT INTO events VALUES (8, 'run~v000001', CAST('{"seq":8,"at":"2026-11-21T20:22:35.700Z","kind":"version","subject":"run~v000001","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":1,"run":"run"}}
5602e65c267291e2' AS BLOB));
INSERT INTO events VALUES (9, 'a:1', CAST('{"seq":9,"at":"2026-11-21T20:22:35.701Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000001","data":{"state":"UPDATING"}}
69b667ce7fb5cdbb' AS BLOB));
INSERT INTO events VALUES (10, 'b:1', CAST('{"seq":10,"at":"2026-11-21T20:22:35.702Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000001","data":{"state":"UPDATING"}}
6c7968b2162453ae' AS BLOB));
INSERT INTO events VALUES (11, 'run~v000001', CAST('{"seq":11,"at":"2026-11-21T20:22:35.702Z","kind":"rollout","subject":"run~v000001","text":"rollout 1 to run~v000001: newest good version","data":{"number":1,"state":"PENDING"}}
ea61413f1c31b8c9' AS BLOB));
INSERT INTO events VALUES (12, 'run~v000001', CAST('{"seq":12,"at":"2026-11-21T20:22:35.702Z","kind":"rollout","subject":"run~v000001","text":"rollout 1 to run~v000001: ROLLING","data":{"number":1,"state":"ROLLING"}}
300b03dc2e457144' AS BLOB));
INSERT INTO events VALUES (13, 'a:1', CAST('{"seq":13,"at":"2026-11-21T20:22:35.705Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000001","data":{"state":"IN_SYNC"}}
78369def2bc947c0' AS BLOB));
INSERT INTO events VALUES (14, 'b:1', CAST('{"seq":14,"at":"2026-11-21T20:22:35.705Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000001","data":{"state":"IN_SYNC"}}
ba6bf33692226381' AS BLOB));
INSERT INTO events VALUES (15, 'run~v000001', CAST('{"seq":15,"at":"2026-11-21T20:22:35.705Z","kind":"rollout","subject":"run~v000001","text":"rollout 1 to run~v000001: COMPLETE","data":{"number":1,"state":"COMPLETE"}}
e7ec46e068fbf6ff' AS BLOB));
INSERT INTO events VALUES (16, 'run~v000001', CAST('{"seq":16,"at":"2026-11-21T20:22:35.705Z","kind":"version","subject":"run~v000001","text":"served: step 1 is proven on every reachable engine","data":{"state":"SEALED","step":1,"run":"run"}}
f7330062a47a5a72' AS BLOB));
INSERT INTO events VALUES (17, 'run~v000002', CAST('{"seq":17,"at":"2026-11-21T20:22:35.731Z","kind":"version","subject":"run~v000002","text":"found in the root","data":{"state":"ANNOUNCED","step":2,"run":"run"}}
b68f8512cb0a017f' AS BLOB));
INSERT INTO events VALUES (18, 'run~v000002', CAST('{"seq":18,"at":"2026-11-21T20:22:35.740Z","kind":"version","subject":"run~v000002","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":2,"run":"run"}}
c5e2a884221dbf3c' AS BLOB));
INSERT INTO events VALUES (19, 'a:1', CAST('{"seq":19,"at":"2026-11-21T20:22:35.741Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000002","data":{"state":"UPDATING"}}
2ac28e28b29e5c6a' AS BLOB));
INSERT INTO events VALUES (20, 'b:1', CAST('{"seq":20,"at":"2026-11-21T20:22:35.741Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000002","data":{"state":"UPDATING"}}
63ce2cc285b9b1dd' AS BLOB));
INSERT INTO events VALUES (21, 'run~v000002', CAST('{"seq":21,"at":"2026-11-21T20:22:35.741Z","kind":"rollout","subject":"run~v000002","text":"rollout 2 to run~v000002: newest good version","data":{"number":2,"state":"PENDING"}}
81325f6e0fac39c2' AS BLOB));
INSERT INTO events VALUES (22, 'run~v000002', CAST('{"seq":22,"at":"2026-11-21T20:22:35.741Z","kind":"rollout","subject":"run~v000002","text":"rollout 2 to run~v000002: ROLLING","data":{"number":2,"state":"ROLLING"}}
c6b9c7b07655e8ea' AS BLOB));
INSERT INTO events VALUES (23, 'a:1', CAST('{"seq":23,"at":"2026-11-21T20:22:35.743Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000002","data":{"state":"IN_SYNC"}}
75f2d1ce29521adc' AS BLOB));
INSERT INTO events VALUES (24, 'b:1', CAST('{"seq":24,"at":"2026-11-21T20:22:35.743Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000002","data":{"state":"IN_SYNC"}}
61d02414d59f0cda' AS BLOB));
INSERT INTO events VALUES (25, 'run~v000002', CAST('{"seq":25,"at":"2026-11-21T20:22:35.744Z","kind":"rollout","subject":"run~v000002","text":"rollout 2 to run~v000002: COMPLETE","data":{"number":2,"state":"COMPLETE"}}
425d944c7530aba8' AS BLOB));
INSERT INTO events VALUES (26, 'run~v000002', CAST('{"seq":26,"at":"2026-11-21T20:22:35.744Z","kind":"version","subject":"run~v000002","text":"served: step 2 is proven on every reachable engine","data":{"state":"SEALED","step":2,"run":"run"}}
cb1f9e1efe5a790d' AS BLOB));
INSERT INTO events VALUES (27, 'run~v000003', CAST('{"seq":27,"at":"2026-11-21T20:22:35.777Z","kind":"version","subject":"run~v000003","text":"found in the root","data":{"state":"ANNOUNCED","step":3,"run":"run"}}
263d17f1f1e4111d' AS BLOB));
INSERT INTO events VALUES (28, 'run~v000003', CAST('{"seq":28,"at":"2026-11-21T20:22:35.786Z","kind":"version","subject":"run~v000003","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":3,"run":"run"}}
9af8c88b8bc064f5' AS BLOB));
INSERT INTO events VALUES (29, 'a:1', CAST('{"seq":29,"at":"2026-11-21T20:22:35.786Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000003","data":{"state":"UPDATING"}}
287cb548bc3e6325' AS BLOB));
INSERT INTO events VALUES (30, 'b:1', CAST('{"seq":30,"at":"2026-11-21T20:22:35.787Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000003","data":{"state":"UPDATING"}}
d20e610c5ac8da08' AS BLOB));
INSERT INTO events VALUES (31, 'run~v000003', CAST('{"seq":31,"at":"2026-11-21T20:22:35.787Z","kind":"rollout","subject":"run~v000003","text":"rollout 3 to run~v000003: newest good version","data":{"number":3,"state":"PENDING"}}
4619de4db46ba00b' AS BLOB));
INSERT INTO events VALUES (32, 'run~v000003', CAST('{"seq":32,"at":"2026-11-21T20:22:35.787Z","kind":"rollout","subject":"run~v000003","text":"rollout 3 to run~v000003: ROLLING","data":{"number":3,"state":"ROLLING"}}
c0da420ce065bc82' AS BLOB));
INSERT INTO events VALUES (33, 'a:1', CAST('{"seq":33,"at":"2026-11-21T20:22:35.789Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000003","data":{"state":"IN_SYNC"}}
716ba5b228c9ecae' AS BLOB));
INSERT INTO events VALUES (34, 'b:1', CAST('{"seq":34,"at":"2026-11-21T20:22:35.789Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000003","data":{"state":"IN_SYNC"}}
b37e1fb9ba30b496' AS BLOB));
INSERT INTO events VALUES (35, 'run~v000003', CAST('{"seq":35,"at":"2026-11-21T20:22:35.789Z","kind":"rollout","subject":"run~v000003","text":"rollout 3 to run~v000003: COMPLETE","data":{"number":3,"state":"COMPLETE"}}
f83441b7020f7e06' AS BLOB));
INSERT INTO events VALUES (36, 'run~v000003', CAST('{"seq":36,"at":"2026-11-21T20:22:35.790Z","kind":"version","subject":"run~v000003","text":"served: step 3 is proven on every reachable engine","data":{"state":"SEALED","step":3,"run":"run"}}
b2932ee4093431af' AS BLOB));
INSERT INTO events VALUES (37, 'run~v000004', CAST('{"seq":37,"at":"2026-11-21T20:22:35.820Z","kind":"version","subject":"run~v000004","text":"found in the root","data":{"state":"ANNOUNCED","step":4,"run":"run"}}
acedc55d48683b71' AS BLOB));
INSERT INTO events VALUES (38, 'run~v000004', CAST('{"seq":38,"at":"2026-11-21T20:22:35.825Z","kind":"version","subject":"run~v000004","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":4,"run":"run"}}
eeca7709789ecc82' AS BLOB));
INSERT INTO events VALUES (39, 'a:1', CAST('{"seq":39,"at":"2026-11-21T20:22:35.825Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}
4fc40b6c0819407c' AS BLOB));
INSERT INTO events VALUES (40, 'b:1', CAST('{"seq":40,"at":"2026-11-21T20:22:35.825Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}
224febb496b1085f' AS BLOB));
INSERT INTO events VALUES (41, 'run~v000004', CAST('{"seq":41,"at":"2026-11-21T20:22:35.825Z","kind":"rollout","subject":"run~v000004","text":"rollout 4 to run~v000004: newest good version","data":{"number":4,"state":"PENDING"}}
5d503be526f83fbe' AS BLOB));
INSERT INTO events VALUES (42, 'run~v000004', CAST('{"seq":42,"at":"2026-11-21T20:22:35.826Z","kind":"rollout","subject":"run~v000004","text":"rollout 4 to run~v000004: ROLLING","data":{"number":4,"state":"ROLLING"}}
26c330f1275455b6' AS BLOB));
INSERT INTO events VALUES (43, 'a:1', CAST('{"seq":43,"at":"2026-11-21T20:22:35.828Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}
d5e873a059575ffb' AS BLOB));
INSERT INTO events VALUES (44, 'b:1', CAST('{"seq":44,"at":"2026-11-21T20:22:35.828Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}
6c69c9770b912eb0' AS BLOB));
INSERT INTO events VALUES (45, 'run~v000004', CAST('{"seq":45,"at":"2026-11-21T20:22:35.828Z","kind":"rollout","subject":"run~v000004","text":"rollout 4 to run~v000004: COMPLETE","data":{"number":4,"state":"COMPLETE"}}
093f92c2eea385d2' AS BLOB));
INSERT INTO events VALUES (46, 'run~v000004', CAST('{"seq":46,"at":"2026-11-21T20:22:35.828Z","kind":"version","subject":"run~v000004","text":"served: step 4 is proven on every reachable engine","data":{"state":"SEALED","step":4,"run":"run"}}
2fdc0c3def675ef0' AS BLOB));
INSERT INTO events VALUES (47, 'run~v000002', CAST('{"seq":47,"at":"2026-11-21T20:22:35.852Z","kind":"version","subject":"run~v000002","text":"pinned","data":{"state":"SEALED","step":2,"run":"run"}}
8ddbbb5b28364ce4' AS BLOB));
INSERT INTO events VALUES (48, 'run~v000001', CAST('{"seq":48,"at":"2026-11-21T20:22:35.870Z","kind":"version","subject":"run~v000001","text":"retired: nobody needs it","data":{"state":"RETIRED","step":1,"run":"run"}}
bdecd3b3501965de' AS BLOB));
INSERT INTO events VALUES (49, 'run~v000001', CAST('{"seq":49,"at":"2026-11-21T20:22:35.874Z","kind":"version","subject":"run~v000001","text":"deleted","data":{"state":"DELETED","step":1,"run":"run"}}
aef9b815225c867d' AS BLOB));
INSERT INTO events VALUES (50, 'run~v000005', CAST('{"seq":50,"at":"2026-11-21T20:22:35.916Z","kind":"version","subject":"run~v000005","text":"found in the root","data":{"state":"ANNOUNCED","step":5,"run":"run"}}
642243ea45d6263c' AS BLOB));
INSERT INTO events VALUES (51, 'run~v000005', CAST('{"seq":51,"at":"2026-11-21T20:22:35.920Z","kind":"version","subject":"run~v000005","text":"rejected: tensor layer.0.weight (F32 [4, 3]) is missing (the model is /srv/refitd/base): an engine would go on with its old values; publish every tensor, or say allow_missing in the notice","data":{"state":"REJECTED","step":5,"run":"run"}}
222767502278e030' AS BLOB));
INSERT INTO events VALUES (52, 'run~v000006', CAST('{"seq":52,"at":"2026-11-21T20:22:35.959Z","kind":"version","subject":"run~v000006","text":"found in the root","data":{"state":"ANNOUNCED","step":6,"run":"run"}}
9b344204ab6d7a02' AS BLOB));
INSERT INTO events VALUES (53, 'run~v000006', CAST('{"seq":53,"at":"2026-11-21T20:22:35.970Z","kind":"version","subject":"run~v000006","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":6,"run":"run"}}
79434210e5dc4b31' AS BLOB));
INSERT INTO events VALUES (54, 'a:1', CAST('{"seq":54,"at":"2026-11-21T20:22:35.970Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000006","data":{"state":"UPDATING"}}
3983034a6cfeddf1' AS BLOB));
INSERT INTO events VALUES (55, 'b:1', CAST('{"seq":55,"at":"2026-11-21T20:22:35.970Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000006","data":{"state":"UPDATING"}}
e8289f070cc21eda' AS BLOB));
INSERT INTO events VALUES (56, 'run~v000006', CAST('{"seq":56,"at":"2026-11-21T20:22:35.970Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006: newest good version","data":{"number":5,"state":"PENDING"}}
c19156e08fcf83bc' AS BLOB));
INSERT INTO events VALUES (57, 'run~v000006', CAST('{"seq":57,"at":"2026-11-21T20:22:35.971Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006: ROLLING","data":{"number":5,"state":"ROLLING"}}
daf94a4c73d07732' AS BLOB));
INSERT INTO events VALUES (58, 'a:1', CAST('{"seq":58,"at":"2026-11-21T20:22:35.973Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000006","data":{"state":"IN_SYNC"}}
b788ed346985c89e' AS BLOB));
INSERT INTO events VALUES (59, 'b:1', CAST('{"seq":59,"at":"2026-11-21T20:22:35.973Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000006","data":{"state":"IN_SYNC"}}
89c77728b51cbee3' AS BLOB));
INSERT INTO events VALUES (60, 'run~v000006', CAST('{"seq":60,"at":"2026-11-21T20:22:35.973Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006: COMPLETE","data":{"number":5,"state":"COMPLETE"}}
93d38e38268db9c9' AS BLOB));
INSERT INTO events VALUES (61, 'run~v000006', CAST('{"seq":61,"at":"2026-11-21T20:22:35.973Z","kind":"version","subject":"run~v000006","text":"served: step 6 is proven on every reachable engine","data":{"state":"SEALED","step":6,"run":"run"}}
c0d5940e4c02c383' AS BLOB));
INSERT INTO events VALUES (62, 'run~v000006', CAST('{"seq":62,"at":"2026-11-21T20:22:35.976Z","kind":"version","subject":"run~v000006","text":"barred: run run rolls back to run~v000004","data":{"state":"SEALED","step":6,"run":"run"}}
63443627c346081c' AS BLOB));
INSERT INTO events VALUES (63, 'run~v000005', CAST('{"seq":63,"at":"2026-11-21T20:22:35.976Z","kind":"version","subject":"run~v000005","text":"barred: run run rolls back to run~v000004","data":{"state":"REJECTED","step":5,"run":"run"}}
c7c94f93bb353e21' AS BLOB));
INSERT INTO events VALUES (64, 'a:1', CAST('{"seq":64,"at":"2026-11-21T20:22:35.976Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}
85bceda9abe010e8' AS BLOB));
INSERT INTO events VALUES (65, 'b:1', CAST('{"seq":65,"at":"2026-11-21T20:22:35.976Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}
ff1fabe6bada837c' AS BLOB));
INSERT INTO events VALUES (66, 'run~v000006', CAST('{"seq":66,"at":"2026-11-21T20:22:35.977Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006 is ROLLED_BACK","data":{"number":5,"state":"ROLLED_BACK"}}
90a828bf47f9446d' AS BLOB));
INSERT INTO events VALUES (67, 'run~v000004', CAST('{"seq":67,"at":"2026-11-21T20:22:35.977Z","kind":"rollout","subject":"run~v000004","text":"rollout 6 to run~v000004: rolled back from run~v000006","data":{"number":6,"state":"PENDING"}}
58037b5a1a9d588f' AS BLOB));
INSERT INTO events VALUES (68, 'run~v000004', CAST('{"seq":68,"at":"2026-11-21T20:22:35.977Z","kind":"rollout","subject":"run~v000004","text":"rollout 6 to run~v000004: ROLLING","data":{"number":6,"state":"ROLLING"}}
05080fd59ad54a81' AS BLOB));
INSERT INTO events VALUES (69, 'a:1', CAST('{"seq":69,"at":"2026-11-21T20:22:35.980Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}
65a1b56bb5dc6960' AS BLOB));
INSERT INTO events VALUES (70, 'b:1', CAST('{"seq":70,"at":"2026-11-21T20:22:35.980Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}
d3be4ab2c3373661' AS BLOB));
INSERT INTO events VALUES (71, 'run~v000004', CAST('{"seq":71,"at":"2026-11-21T20:22:35.980Z","kind":"rollout","subject":"run~v000004","text":"rollout 6 to run~v000004: COMPLETE","data":{"number":6,"state":"COMPLETE"}}
3a4bae5ed4f81f89' AS BLOB));
INSERT INTO origin VALUES (1, CAST('{"cause":null,"lost":false,"rebuilt":true}
5b02cc3a931f6e10' AS BLOB));
